"""For event loops; _sync is made of it."""
