"""What A2C, PPO, PPO2 and SVPG share: settings, networks on flat vectors, critic, and the loop over minibatches.

NumPy only. A minibatch of 64 rows through two layers of 64 takes a processor less time than an autograd engine takes to
note what it did, so the few derivatives there are are written down.
"""
