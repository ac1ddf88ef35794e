"""Page of a gateway at `/`, and the JSON views that it reads."""
