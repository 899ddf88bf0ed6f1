"""What a sync costs on more ranks than there are here: closed forms, and drawn stragglers. README.md has the model."""
