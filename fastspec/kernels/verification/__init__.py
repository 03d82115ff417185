"""The choice of a token at every node, under the call's sampling settings, and the walk down the tree."""
