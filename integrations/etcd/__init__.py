"""An elector for control planes on several machines: ``--election etcd://HOST:PORT,.../NAME``."""
