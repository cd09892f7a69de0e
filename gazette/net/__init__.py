"""Servers: gRPC and HTTP, their limits, and how they stop."""
