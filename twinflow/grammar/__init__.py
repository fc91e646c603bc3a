"""Grammars that replies are held to: compiled from text, then followed token by token. No torch, no threads of its own."""
