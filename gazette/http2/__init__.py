"""gRPC over our own HTTP/2: its clients, and what both ends of a connection share."""
