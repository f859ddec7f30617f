"""What is told to the Kubernetes API server of the node's GPUs. The daemon imports none of it."""
