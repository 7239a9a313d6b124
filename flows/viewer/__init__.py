"""The page of `metaloom view`: a local server of JSON data, drawn by the browser."""
