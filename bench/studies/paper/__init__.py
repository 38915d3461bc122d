"""`bench paper`: published and modeled figures."""
