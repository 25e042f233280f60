"""The KV-event bridge: what a pool has cached, as vLLM's KV events over ZMQ."""
