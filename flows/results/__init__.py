"""What operations return: frozen dataclasses, and what follows from them. Views show them, operations make them."""
