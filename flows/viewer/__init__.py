"""The page of `metaloom view`: a local server provides JSON data, which the browser draws."""
