"""All-reduce algorithms, each a pure function of a transport: rank, size, send and receive."""
