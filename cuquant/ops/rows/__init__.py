"""What a layer does to rows, and their quantization, in one kernel."""
