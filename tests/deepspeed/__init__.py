"""What the DeepSpeed trainer has beyond the contract; skipped where the package is absent."""
