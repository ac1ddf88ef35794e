"""Decode ring: its leader, its turns and their registry, and the engine of feed and room."""
