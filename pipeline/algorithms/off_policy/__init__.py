"""DQL and SAC, and the parts that they share with PEARL."""
