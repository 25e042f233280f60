"""The engine as an HTTP server that speaks OpenAI's protocol: ``python -m engine serve``."""
