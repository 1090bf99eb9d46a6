"""Will a config be used, what differs between two of them, and may one be contributed?"""
