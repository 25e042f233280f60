"""SGLang's hierarchical cache with a kvplane pool below its host memory."""
