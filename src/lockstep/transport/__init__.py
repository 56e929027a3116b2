"""How bytes travel between ranks: headers, small and of one fixed size, and segments, whose sizes both sides know.

A `Transport` is chosen once for each group. It uses the backend's collectives. On the CPU, messages go directly from
rank to rank instead (`PairwiseCpu`), which is faster.

Every header ends with the digest of this rank's calls (`Calls`), and so do the messages of small reductions and
broadcasts begin with it: ranks that have made different calls find out wherever a message of lockstep's own is sent.
"""
