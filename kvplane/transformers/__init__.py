"""kvplane for Hugging Face transformers (``pip install kvplane[transformers]``): the one way into
its models, for the engine too.
"""
