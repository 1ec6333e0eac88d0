from horovod._only_torch import refuse

refuse(__name__)
