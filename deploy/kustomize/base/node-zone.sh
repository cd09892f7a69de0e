#!/bin/sh
# Prints the failure zone of a node, by its name ($1): replace it (configMapGenerator, behavior: replace).
# Kubernetes does not tell a pod the labels of its node.
echo local
