"""What ranks know of each other beside their collectives: who calls what, who is late or gone, and why."""
