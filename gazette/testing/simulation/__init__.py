"""Simulation of a whole cluster in one process: the loop, the network, etcd, disks, stores and threads.

Brokers, members and clients are the shipped ones. A seed decides everything else, and time is virtual.
"""
