"""What is done with the numbers of the slots, and with the loss."""
