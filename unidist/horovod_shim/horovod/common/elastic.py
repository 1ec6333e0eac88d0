from unidist.elastic.loop import run_fn  # noqa: F401
from unidist.elastic.notification import notification_manager  # noqa: F401
from unidist.elastic.state import ObjectState, State  # noqa: F401
