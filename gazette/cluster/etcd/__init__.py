"""A client of etcd."""
