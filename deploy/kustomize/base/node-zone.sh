#!/bin/sh
# Prints the failure zone of a node, by its name ($1). NODE_ZONE is the label topology.kubernetes.io/zone of the
# node: Kubernetes gives it to pods from 1.35 on. Replace this script (configMapGenerator, behavior: replace)
# for an older Kubernetes, and for other zones.
echo "${NODE_ZONE:-local}"
