"""What zckpt does inside of DeepSpeed, Trainer, Accelerate and Lightning, for users who call their functions."""
