"""What the numbered scripts share: one noun a module, lower floors know nothing of higher ones."""
