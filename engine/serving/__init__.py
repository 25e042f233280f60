"""The engine as an HTTP server that speaks OpenAI's protocol: ``kvplane serve``."""
