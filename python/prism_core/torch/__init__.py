"""What `prism_core` knows about PyTorch: code that is loaded into the training program's own interpreter."""
