"""The words of pairing codes.

Owns 256 English nouns that are easily said, heard and spelt: no two begin with the same four
letters, sound alike or differ in one letter only. A change makes older versions refuse the codes.
"""

_TEXT = """
acorn amber anchor ankle apple apron arrow artist atlas autumn badge bagel baker ballet bamboo
banana barrel basket beard beaver bench berry birch blanket blossom boat book bottle boulder
bowl branch bread brick bridge broom brush bubble bucket button cabin cactus camel candle canoe
carpet castle cedar cherry chess chimney clock cloud clover coconut coffee compass copper coral
cotton crab crayon cricket crown cupcake curtain daisy delta desert diamond dinner doctor
dolphin donkey dragon drawer drum eagle echo elbow elephant emerald envelope evening fabric
falcon feather fence fern finger flag flower flute forest fountain frame frog galaxy garden
garlic glass glove goose granite grape guitar hammer harvest hedge helmet honey horse iceberg
igloo insect island jacket jewel jungle kayak kettle kitchen kite koala ladder lake lamp lantern
lemon leopard lettuce library lily lion lizard lobster lunch magnet mango maple marble market
meadow medal melon mirror moon motor mouse muffin museum napkin needle nest noodle notebook
oasis ocean olive onion orange orchard otter oven oyster paddle palace panda paper parrot peach
pearl pebble pencil pepper piano picnic pigeon pillow pilot pine pizza planet plum pocket potato
pumpkin puppet puzzle pyramid queen rabbit radio ribbon rice river robin roof ruby salad ship
shoe silver skate snail snow sock sofa soup spider spoon squirrel star stone sugar summer sunset
swan table target teacher temple tennis thunder ticket tiger toast tomato tower tractor train
tree trumpet tulip tunnel turtle umbrella unicorn valley vanilla velvet village violin volcano
wagon walnut walrus water whale wheel whistle window winter wolf yard zebra zipper
"""
WORDS = tuple(_TEXT.split())
