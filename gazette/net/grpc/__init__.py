"""Servers of gRPC over HTTP/2. In Python, most cost of gRPC is between the socket and the handler."""
