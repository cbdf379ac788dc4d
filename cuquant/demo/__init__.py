"""The demo: what each format costs in bits and accuracy on a real sentence encoder."""
