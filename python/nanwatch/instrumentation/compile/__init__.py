"""Watched calls inside torch.compile: Dynamo, the operators in graphs, CUDA graphs.

Outside of torch.compile a call reaches its recorder by `calls.py` of the room above.
"""
