"""How bytes travel within one group: tensors on their own device, and what the hosts tell each other over gloo."""
