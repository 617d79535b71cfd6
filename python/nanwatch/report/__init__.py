"""Record, Frame, Finding and Report, and their text, JSON and HTML.

Plain data that is read without torch. No model, no hook and no tensor is here.
"""
