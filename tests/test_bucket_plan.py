"""The bucket plan is a pure function: every parameter once, limits kept, order of completion."""

from __future__ import annotations

import random

import pytest
import torch

from unidist.bucket import Bucket, Shape, keeps_strides, plan


def test_first_bucket_is_small_then_larger_ones() -> None:
    shapes = [Shape(4, "f")] * 6
    assert plan(shapes, range(6), first_bytes=4, bucket_bytes=8) == [[0], [1, 2], [3, 4], [5]]


def test_order_of_arrival_is_kept() -> None:
    shapes = [Shape(4, "f")] * 4
    assert plan(shapes, [3, 1, 0, 2], 8, 8) == [[3, 1], [0, 2]]


def test_a_parameter_larger_than_the_limit_has_a_bucket_of_its_own() -> None:
    shapes = [Shape(1, "f"), Shape(100, "f"), Shape(1, "f")]
    assert plan(shapes, range(3), 10, 10) == [[0], [1], [2]]


def test_kinds_never_mix_and_buckets_stand_in_order_of_completion() -> None:
    shapes = [Shape(4, "f"), Shape(4, "h"), Shape(4, "f"), Shape(4, "h"), Shape(4, "h")]
    # The bucket of f is full after parameter 2, that of h after parameter 4.
    assert plan(shapes, range(5), 100, 100) == [[0, 2], [1, 3, 4]]


def test_groups_have_buckets_of_their_own_whatever_their_size() -> None:
    shapes = [Shape(4, "f", 0), Shape(4, "f"), Shape(400, "f", 0), Shape(4, "f", 1)]
    assert plan(shapes, range(4), 8, 8) == [[1], [0, 2], [3]]


def test_random_plans_place_everything_once_within_limits() -> None:
    generator = random.Random(1)
    for _ in range(200):
        count = generator.randrange(0, 30)
        shapes = [
            Shape(
                generator.randrange(1, 50),
                generator.choice("fh"),
                generator.choice([None, None, 0, 1]),
            )
            for _ in range(count)
        ]
        order = list(range(count))
        generator.shuffle(order)
        first, limit = generator.randrange(1, 40), generator.randrange(40, 100)
        buckets = plan(shapes, order, first, limit)
        assert sorted(i for bucket in buckets for i in bucket) == list(range(count))
        for bucket in buckets:
            assert len({(shapes[i].kind, shapes[i].group) for i in bucket}) == 1
            total = sum(shapes[i].bytes for i in bucket)
            if shapes[bucket[0]].group is None:
                assert total <= limit or len(bucket) == 1


def test_views_have_the_parameters_strides_and_share_the_flat_memory() -> None:
    conv = torch.nn.Parameter(torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    bias = torch.nn.Parameter(torch.randn(()))
    bucket = Bucket([conv, bias], [True, True], "b")
    assert bucket.views[0].stride() == conv.stride()
    assert bucket.views[1].shape == ()
    bucket.views[0].fill_(2)
    bucket.views[1].fill_(3)
    assert bucket.gradients.tolist() == [2.0] * 48 + [3.0]
    assert bucket.flags.tolist() == [1.0, 1.0]
    assert bucket.missing == 2


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3).t(), True),
        (torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), True),
        (torch.zeros(1, 3)[:, ::1], True),
        (torch.zeros(()), True),
        (torch.zeros(4, 4)[:, :2], False),
        (torch.zeros(4)[::2], False),
        (torch.zeros(1).expand(3), False),
    ],
)
def test_keeps_strides(tensor: torch.Tensor, dense: bool) -> None:
    assert keeps_strides(tensor) is dense
