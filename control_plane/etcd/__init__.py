"""etcd's API, as far as the elector uses it."""
