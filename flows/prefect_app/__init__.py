"""Prefect: deployments, artifacts, the server and its plugin."""
