"""Prefect integration: deployments, artifacts, the server and its plugin."""
