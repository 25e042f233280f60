"""Generated from protos/kvplane/router/ext_proc/v3."""
