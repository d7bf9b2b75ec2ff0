"""The stores for object stores and web servers, which ``zckpt.storage.schemes`` names."""
