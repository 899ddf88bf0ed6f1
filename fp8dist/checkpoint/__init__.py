"""Saving and loading: under which key each part of the state is saved, and state that TransformerEngine has saved."""
