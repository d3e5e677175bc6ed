"""The READMEs' pictures, and the scripts that draw them again."""
