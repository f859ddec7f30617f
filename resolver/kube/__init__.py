"""Reports the node's GPUs to the Kubernetes API server. The daemon imports none of it."""
