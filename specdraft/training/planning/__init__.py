"""Memory, disk, time and bottleneck of a training, before anything is loaded."""
