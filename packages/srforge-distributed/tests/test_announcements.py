from srforge.distributed.announcements import say_once


def test_each_message_is_said_once(caplog):
    say_once.cache_clear()
    for message in ("one", "two", "one"):
        say_once(message)
    assert [record.message for record in caplog.records] == ["one", "two"]
