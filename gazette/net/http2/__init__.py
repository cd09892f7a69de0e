"""HTTP/2 of our own: what gRPC in Python costs most is spent between the socket and the handler."""
