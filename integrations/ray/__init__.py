"""Both planes on a Ray cluster: ``python -m kvplane.integrations.ray up``. Needs the extra ``ray``.

Ray places servers, starts them again and tells where they are. It is not in the path of any call:
its actors run the ordinary programs, each a process of its own.
"""
