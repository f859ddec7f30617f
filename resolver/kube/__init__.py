"""Reports the node's GPUs to the Kubernetes API server, and is kubectl's plugin. The daemon imports none of it."""
